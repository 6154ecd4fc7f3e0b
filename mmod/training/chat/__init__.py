"""Fine-tuning of vision-language models on conversations."""
