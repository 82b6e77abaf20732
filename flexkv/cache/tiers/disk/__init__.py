"""The unit's own disks: folders on SSDs, with the pages distributed over all folders."""
