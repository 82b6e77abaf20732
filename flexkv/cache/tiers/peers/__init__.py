"""Folders of other units with the same pages, which are read and never written."""
