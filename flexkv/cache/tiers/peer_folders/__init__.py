"""Folders of other units on this unit's disks, as found at its start; they are read and never written. The pages of
units that run now, in host memory and in folders, belong to `running_peers`.
"""
