package pure

import _ "github.com/gogpu/wgpu/hal/metal" // registers the driver
