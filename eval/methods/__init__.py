"""The rival methods behind one small interface, one a file."""
