"""Units of one user on one machine that read each other's host pools and folders while all of them run."""
