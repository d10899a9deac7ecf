"""What Python does before it runs a script of the launcher's: it imports `sitecustomize`."""
