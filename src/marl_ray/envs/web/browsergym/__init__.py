"""Environments of BrowserGym (https://github.com/ServiceNow/BrowserGym), played by its own package in another process."""
