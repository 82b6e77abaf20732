"""Lets running units of one user read each other's pages. They read host pools and folders of units on the same
machine, and folders of units on other machines.
"""
