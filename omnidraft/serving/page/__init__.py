"""The page that shows a text being drafted, pass by pass, and the events that it follows."""
