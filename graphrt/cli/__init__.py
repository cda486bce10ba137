"""The command line `graphrt`: one file per command, on top of the library."""
