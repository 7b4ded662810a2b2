"""``python -m dspark_lab``: the command line, where nothing can be installed."""

from dspark_lab.cli import main

main()
