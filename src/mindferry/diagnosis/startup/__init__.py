"""From the logs of a run that did not start to a named cause.

`diagnose` is for other rooms; `read` gives the whole picture behind it.
"""

from __future__ import annotations

from mindferry.diagnosis.startup.report import Picture, diagnose, diagnose_exception, findings_of, read

__all__ = ["Picture", "diagnose", "diagnose_exception", "findings_of", "read"]
