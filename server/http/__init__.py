"""HTTP/1.1 on the wire: heads, framing, and the fast lane that answers inference."""
