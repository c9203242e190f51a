"""Jobs of several processes on this machine, through MindSpore's own msrun."""
