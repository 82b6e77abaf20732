"""The unit's own disks: SSD folders, with pages distributed over all of them."""
