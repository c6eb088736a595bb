"""The ``pate`` command. Hydra is known here, and in the packages of the commands, nowhere else."""
