"""What a snapshot is: a check-summed folder with a manifest, a serving part and a resume part."""
