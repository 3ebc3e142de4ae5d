"""Records as one page of HTML that needs nothing beside itself: `flashtile report`."""
