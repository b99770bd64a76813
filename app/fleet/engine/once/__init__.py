"""The seen-store: a key is seen only after its processing has succeeded."""
