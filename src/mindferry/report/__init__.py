"""One self-contained HTML page about a run, alone or beside others."""
