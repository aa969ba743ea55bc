"""What the machine has: devices, and cores of its CPU."""
