"""How running units of one user read each other's pages: host pools and folders on one machine, folders on others."""
