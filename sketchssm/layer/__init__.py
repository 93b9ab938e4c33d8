"""What a layer is: its recurrence, coefficient maps, formats of sketches and slots."""
