"""Programs of the user beside a unit and its ranks, in processes of their own, and what they may ask of their unit."""
