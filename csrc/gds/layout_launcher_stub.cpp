#include "gds/layout_launcher.h"

namespace flexkv {

LayoutLauncher layout_launcher() { return nullptr; }

}  // namespace flexkv
