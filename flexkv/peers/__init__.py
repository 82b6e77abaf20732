"""Lets running units of one user read each other's pages: from the host pools and folders of units on the same machine,
and from the folders of units on other machines.
"""
