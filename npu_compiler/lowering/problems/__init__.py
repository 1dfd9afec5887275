"""What computations with an algorithm of their own are asked to do, the same for every target."""
