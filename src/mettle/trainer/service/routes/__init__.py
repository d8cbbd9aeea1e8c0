"""The routes, by what they are about; together they are the API that clients speak."""
