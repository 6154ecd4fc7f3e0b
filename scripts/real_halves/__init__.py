"""A vision-language model of trained halves, and what image tokens cost it."""
