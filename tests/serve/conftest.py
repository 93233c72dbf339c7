"""Real servers, as the end-to-end tests have them."""

from tests.e2e.conftest import home, start_server  # noqa: F401 - fixtures
