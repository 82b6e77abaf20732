"""Folders of other units with the same pages; they are read and never written."""
