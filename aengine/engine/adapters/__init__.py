"""What changes the model's weights for single requests, as the host sees it: the seat (`adapters.py`), and LoRA."""
