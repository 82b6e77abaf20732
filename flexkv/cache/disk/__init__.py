"""What the control plane does with a disk tier: finds, brings up, writes and forgets pages."""
