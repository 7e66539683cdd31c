"""What a step yields beside tokens: `Results` walks the features that make it."""
