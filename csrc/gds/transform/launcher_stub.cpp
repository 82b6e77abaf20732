#include "gds/transform/launcher.h"

namespace flexkv {

LayoutLauncher layout_launcher() { return nullptr; }

}  // namespace flexkv
