"""What a rank exchanges with others for each step, beside what its layers do."""
