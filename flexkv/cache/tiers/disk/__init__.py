"""The unit's own disks, or SSD folders striped over several."""
