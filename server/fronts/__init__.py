"""Front ends: processes that take requests and reach the one engine through a link."""
