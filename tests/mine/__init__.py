"""YOUR CODE: the tests of your own actions and routes. `make test-mine` runs them."""
