"""The unit's own disks: SSD folders, striped over several if there are several."""
