"""The tier of other units' folders that are found on this unit's disks at its start. They are read and never written.
Pages of units that are running belong to the tiers in `running_peers`.
"""
