"""Who is next: bands, tenants in rotation, places at engines. Pure but for `desk`, where tasks wait for their turn."""
