"""What the tests stand on: servers, processes, proxies. Real ones."""
