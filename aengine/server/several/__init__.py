"""Several models behind one application: which of them are awake (`awake.py`), and whose a request is (`app.py`)."""
