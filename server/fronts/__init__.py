"""Front ends: processes that accept requests and reach the one engine through a Link."""
