"""The wire format of the training service: messages and their JSON forms, read into numbers and written from them."""
