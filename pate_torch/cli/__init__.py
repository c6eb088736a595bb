"""The ``pate`` command. Hydra is imported here and in the packages of the commands, nowhere else."""
