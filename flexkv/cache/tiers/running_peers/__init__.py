"""The tiers of pages in the host pools and folders of running peers."""
