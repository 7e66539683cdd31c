"""What the machine grants: limits of the container and of the shell, free memory. Never imports torch."""
