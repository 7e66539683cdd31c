"""What of a rank's memory goes while its engine sleeps, and how it comes back."""
