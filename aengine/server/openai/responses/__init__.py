"""``/v1/responses``.

body ──messages──> chat messages ──stream_chat──> deltas ──items──> output items, and the events that tell of them
          ▲                                                           │
          └──────────────── store (previous_response_id) <────────────┘
"""
