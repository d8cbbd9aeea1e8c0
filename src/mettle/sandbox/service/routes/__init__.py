"""What the routes of the service do, one file for each kind of thing; `app.ROUTES` lists them."""
