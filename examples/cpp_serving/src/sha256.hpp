// The digest of a manifest, which neither libtorch nor the standard library has.
#pragma once

#include <string>
#include <string_view>

// The SHA-256 of a text (FIPS 180-4), as 64 hexadecimal digits.
std::string sha256(std::string_view text);
