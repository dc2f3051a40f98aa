// A Vulkan layer that fails on purpose, below both WebGPU libraries. A test shares a page of
// memory with it: the file that ATTN_VKFAULT names. The layer forwards every call and makes
// one of them fail, as the page says:
//
//	oom    the Nth vkAllocateMemory returns OUT_OF_DEVICE_MEMORY
//	full   so do all from the Nth on
//	lost   the Nth vkQueueSubmit returns DEVICE_LOST, and so do later calls on the device
//	gone   so does the Nth look at a fence, semaphore or idle queue
//	late   for 200 ms, nothing seems to end that the Nth vkQueueSubmit or a later one started
//	host   the Nth call that makes or records something returns OUT_OF_HOST_MEMORY
//	hang   as late, until the test releases it
//
// Calls are counted from 0 while a fault is armed.
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include <vulkan/vk_layer.h>
#include <vulkan/vulkan.h>

enum { NONE, OOM, FULL, LOST, GONE, LATE, HOST, HANG };

typedef struct {
	_Atomic int64_t kind, position; // written by the test
	_Atomic int64_t calls, fired;   // since kind was written; of the calls that kind counts
	_Atomic int64_t released;       // ends a hang
	_Atomic int64_t orphans;        // devices that were there when their instance was destroyed
} control;

static control none, *page = &none;

__attribute__((constructor)) static void map_page(void) {
	char const *path = getenv("ATTN_VKFAULT");
	int fd = path ? open(path, O_RDWR) : -1;
	if (fd < 0) return;
	void *at = mmap(NULL, sizeof(control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (at != MAP_FAILED) page = at;
	close(fd);
}

// A device, the functions below the layer, and its state.
typedef struct {
	void *key, *instance; // the first word of a device and its queues, and of its instance and physical device
	VkDevice handle;
	PFN_vkGetDeviceProcAddr next;
	_Atomic int lost, frozen;
	_Atomic int64_t thaw; // when a late completion arrives, in ns
} device;

enum { MOST = 1024, SEMAPHORES = 64 };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static device devices[MOST];
static PFN_vkGetInstanceProcAddr instance_next;
static PFN_vkDestroyInstance destroy_next; // asked for after CreateInstance, the loader returns its first layer's
static VkInstance instance;

static device *find(void *handle) {
	void *key = *(void **)handle;
	for (int i = 0; i < MOST; i++)
		if (devices[i].key == key) return &devices[i];
	abort();
}

#define NEXT(d, name) ((PFN_vk##name)(d)->next((d)->handle, "vk" #name))

static int64_t now(void) {
	struct timespec t;
	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000000ll + t.tv_nsec;
}

// due counts a call of a kind and reports whether it fails.
static int due(int kind) {
	if (page->kind != kind) return 0;
	int64_t n = atomic_fetch_add(&page->calls, 1);
	int fails = kind == FULL ? n >= page->position : n == page->position;
	if (fails) page->fired = 1;
	return fails;
}

// lose waits for what runs, as a device that is lost runs nothing: its objects may be
// destroyed.
static void lose(device *d) {
	NEXT(d, DeviceWaitIdle)(d->handle);
	d->lost = 1;
}

static int frozen(device *d) {
	if (d->frozen && (page->released || (d->thaw && now() > d->thaw))) d->frozen = 0;
	return d->frozen;
}

// look is called before a look at the progress of a device: it returns DEVICE_LOST,
// NOT_READY for a device that seems to hang, or SUCCESS to forward the call.
static VkResult look(device *d) {
	if (due(GONE)) lose(d);
	if (d->lost) return VK_ERROR_DEVICE_LOST;
	return frozen(d) ? VK_NOT_READY : VK_SUCCESS;
}

// await is look for calls that wait: TIMEOUT when the device still seems to hang then.
static VkResult await(device *d, uint64_t timeout) {
	int64_t start = now();
	VkResult r;
	while ((r = look(d)) == VK_NOT_READY) {
		if ((uint64_t)(now() - start) >= timeout) return VK_TIMEOUT;
		usleep(1000);
	}
	return r;
}

static VKAPI_ATTR VkResult VKAPI_CALL AllocateMemory(VkDevice handle, VkMemoryAllocateInfo const *info, VkAllocationCallbacks const *a, VkDeviceMemory *memory) {
	device *d = find(handle);
	if (due(OOM) || due(FULL)) return VK_ERROR_OUT_OF_DEVICE_MEMORY;
	return NEXT(d, AllocateMemory)(handle, info, a, memory);
}

// Calls that fail for lack of host memory alone.
#define MAKES(name, handle, parameters, arguments) \
	static VKAPI_ATTR VkResult VKAPI_CALL name parameters { \
		device *d = find(handle); \
		return due(HOST) ? VK_ERROR_OUT_OF_HOST_MEMORY : NEXT(d, name) arguments; \
	}
MAKES(CreateBuffer, d0, (VkDevice d0, VkBufferCreateInfo const *info, VkAllocationCallbacks const *a, VkBuffer *made), (d0, info, a, made))
MAKES(CreateShaderModule, d0, (VkDevice d0, VkShaderModuleCreateInfo const *info, VkAllocationCallbacks const *a, VkShaderModule *made), (d0, info, a, made))
MAKES(CreatePipelineLayout, d0, (VkDevice d0, VkPipelineLayoutCreateInfo const *info, VkAllocationCallbacks const *a, VkPipelineLayout *made), (d0, info, a, made))
MAKES(CreateDescriptorSetLayout, d0, (VkDevice d0, VkDescriptorSetLayoutCreateInfo const *info, VkAllocationCallbacks const *a, VkDescriptorSetLayout *made), (d0, info, a, made))
MAKES(CreateComputePipelines, d0, (VkDevice d0, VkPipelineCache cache, uint32_t n, VkComputePipelineCreateInfo const *info, VkAllocationCallbacks const *a, VkPipeline *made), (d0, cache, n, info, a, made))
MAKES(CreateDescriptorPool, d0, (VkDevice d0, VkDescriptorPoolCreateInfo const *info, VkAllocationCallbacks const *a, VkDescriptorPool *made), (d0, info, a, made))
MAKES(AllocateDescriptorSets, d0, (VkDevice d0, VkDescriptorSetAllocateInfo const *info, VkDescriptorSet *made), (d0, info, made))
MAKES(CreateCommandPool, d0, (VkDevice d0, VkCommandPoolCreateInfo const *info, VkAllocationCallbacks const *a, VkCommandPool *made), (d0, info, a, made))
MAKES(AllocateCommandBuffers, d0, (VkDevice d0, VkCommandBufferAllocateInfo const *info, VkCommandBuffer *made), (d0, info, made))
MAKES(BeginCommandBuffer, c, (VkCommandBuffer c, VkCommandBufferBeginInfo const *info), (c, info))
MAKES(EndCommandBuffer, c, (VkCommandBuffer c), (c))
MAKES(MapMemory, d0, (VkDevice d0, VkDeviceMemory m, VkDeviceSize at, VkDeviceSize n, VkMemoryMapFlags flags, void **to), (d0, m, at, n, flags, to))

static VKAPI_ATTR VkResult VKAPI_CALL QueueSubmit(VkQueue queue, uint32_t n, VkSubmitInfo const *submits, VkFence fence) {
	device *d = find(queue);
	if (due(LOST)) lose(d);
	if (d->lost) return VK_ERROR_DEVICE_LOST;
	int late = due(LATE);
	if (late || due(HANG)) {
		d->thaw = late ? now() + 200000000 : 0;
		d->frozen = 1;
	}
	return NEXT(d, QueueSubmit)(queue, n, submits, fence);
}

static VKAPI_ATTR VkResult VKAPI_CALL GetFenceStatus(VkDevice handle, VkFence fence) {
	device *d = find(handle);
	VkResult r = look(d);
	return r == VK_SUCCESS ? NEXT(d, GetFenceStatus)(handle, fence) : r;
}

static VKAPI_ATTR VkResult VKAPI_CALL WaitForFences(VkDevice handle, uint32_t n, VkFence const *fences, VkBool32 all, uint64_t timeout) {
	device *d = find(handle);
	VkResult r = await(d, timeout);
	return r == VK_SUCCESS ? NEXT(d, WaitForFences)(handle, n, fences, all, timeout) : r;
}

static struct { VkSemaphore of; uint64_t value; } seen[SEMAPHORES]; // the values that were reported last

static VKAPI_ATTR VkResult VKAPI_CALL GetSemaphoreCounterValue(VkDevice handle, VkSemaphore s, uint64_t *value) {
	device *d = find(handle);
	VkResult r = look(d);
	if (r == VK_ERROR_DEVICE_LOST) return r;
	pthread_mutex_lock(&lock);
	int i = 0;
	while (i < SEMAPHORES - 1 && seen[i].of && seen[i].of != s) i++;
	if (seen[i].of != s) seen[i].of = s, seen[i].value = 0;
	if (r == VK_SUCCESS && (r = NEXT(d, GetSemaphoreCounterValue)(handle, s, value)) == VK_SUCCESS) seen[i].value = *value;
	if (r == VK_NOT_READY) *value = seen[i].value, r = VK_SUCCESS;
	pthread_mutex_unlock(&lock);
	return r;
}

static VKAPI_ATTR VkResult VKAPI_CALL WaitSemaphores(VkDevice handle, VkSemaphoreWaitInfo const *info, uint64_t timeout) {
	device *d = find(handle);
	VkResult r = await(d, timeout);
	return r == VK_SUCCESS ? NEXT(d, WaitSemaphores)(handle, info, timeout) : r;
}

static VKAPI_ATTR VkResult VKAPI_CALL DeviceWaitIdle(VkDevice handle) {
	device *d = find(handle);
	VkResult r = await(d, UINT64_MAX);
	return r == VK_SUCCESS ? NEXT(d, DeviceWaitIdle)(handle) : r;
}

static VKAPI_ATTR VkResult VKAPI_CALL QueueWaitIdle(VkQueue queue) {
	device *d = find(queue);
	VkResult r = await(d, UINT64_MAX);
	return r == VK_SUCCESS ? NEXT(d, QueueWaitIdle)(queue) : r;
}

static VKAPI_ATTR void VKAPI_CALL DestroySemaphore(VkDevice handle, VkSemaphore s, VkAllocationCallbacks const *a) {
	pthread_mutex_lock(&lock);
	for (int i = 0; i < SEMAPHORES; i++)
		if (seen[i].of == s) seen[i].value = 0; // the handle may come again
	pthread_mutex_unlock(&lock);
	NEXT(find(handle), DestroySemaphore)(handle, s, a);
}

static VKAPI_ATTR void VKAPI_CALL DestroyDevice(VkDevice handle, VkAllocationCallbacks const *a) {
	device *d = find(handle);
	PFN_vkDestroyDevice destroy = NEXT(d, DestroyDevice);
	pthread_mutex_lock(&lock);
	d->key = NULL;
	pthread_mutex_unlock(&lock);
	destroy(handle, a);
}

static VKAPI_ATTR VkResult VKAPI_CALL CreateDevice(VkPhysicalDevice physical, VkDeviceCreateInfo const *info, VkAllocationCallbacks const *a, VkDevice *handle) {
	VkLayerDeviceCreateInfo *link = (void *)info->pNext;
	while (link && !(link->sType == VK_STRUCTURE_TYPE_LOADER_DEVICE_CREATE_INFO && link->function == VK_LAYER_LINK_INFO)) link = (void *)link->pNext;
	if (!link) return VK_ERROR_INITIALIZATION_FAILED;
	PFN_vkGetInstanceProcAddr get = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
	PFN_vkGetDeviceProcAddr next = link->u.pLayerInfo->pfnNextGetDeviceProcAddr;
	link->u.pLayerInfo = link->u.pLayerInfo->pNext;
	VkResult r = ((PFN_vkCreateDevice)get(instance, "vkCreateDevice"))(physical, info, a, handle);
	if (r != VK_SUCCESS) return r;
	pthread_mutex_lock(&lock);
	int i = 0;
	while (i < MOST - 1 && devices[i].key) i++;
	devices[i] = (device){ .key = *(void **)*handle, .instance = *(void **)physical, .handle = *handle, .next = next };
	pthread_mutex_unlock(&lock);
	return VK_SUCCESS;
}

static VKAPI_ATTR VkResult VKAPI_CALL CreateInstance(VkInstanceCreateInfo const *info, VkAllocationCallbacks const *a, VkInstance *handle) {
	VkLayerInstanceCreateInfo *link = (void *)info->pNext;
	while (link && !(link->sType == VK_STRUCTURE_TYPE_LOADER_INSTANCE_CREATE_INFO && link->function == VK_LAYER_LINK_INFO)) link = (void *)link->pNext;
	if (!link) return VK_ERROR_INITIALIZATION_FAILED;
	instance_next = link->u.pLayerInfo->pfnNextGetInstanceProcAddr;
	link->u.pLayerInfo = link->u.pLayerInfo->pNext;
	VkResult r = ((PFN_vkCreateInstance)instance_next(NULL, "vkCreateInstance"))(info, a, handle);
	if (r == VK_SUCCESS) instance = *handle, destroy_next = (PFN_vkDestroyInstance)instance_next(instance, "vkDestroyInstance");
	return r;
}

static VKAPI_ATTR void VKAPI_CALL DestroyInstance(VkInstance handle, VkAllocationCallbacks const *a) {
	pthread_mutex_lock(&lock);
	for (int i = 0; i < MOST; i++)
		if (devices[i].key && devices[i].instance == *(void **)handle) devices[i].instance = NULL, page->orphans++;
	pthread_mutex_unlock(&lock);
	destroy_next(handle, a);
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL GetDeviceProcAddr(VkDevice handle, char const *name);
static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL GetInstanceProcAddr(VkInstance handle, char const *name);

static struct { char const *name; PFN_vkVoidFunction f; } const own[] = {
#define OWN(name) { "vk" #name, (PFN_vkVoidFunction)name }
	OWN(GetInstanceProcAddr), OWN(CreateInstance), OWN(DestroyInstance), OWN(CreateDevice),
	OWN(GetDeviceProcAddr), OWN(DestroyDevice), OWN(AllocateMemory), OWN(QueueSubmit), OWN(GetFenceStatus), OWN(WaitForFences),
	OWN(GetSemaphoreCounterValue), { "vkGetSemaphoreCounterValueKHR", (PFN_vkVoidFunction)GetSemaphoreCounterValue },
	OWN(WaitSemaphores), { "vkWaitSemaphoresKHR", (PFN_vkVoidFunction)WaitSemaphores },
	OWN(CreateBuffer), OWN(CreateShaderModule), OWN(CreatePipelineLayout), OWN(CreateDescriptorSetLayout), OWN(CreateComputePipelines),
	OWN(CreateDescriptorPool), OWN(AllocateDescriptorSets), OWN(CreateCommandPool), OWN(AllocateCommandBuffers), OWN(BeginCommandBuffer),
	OWN(EndCommandBuffer), OWN(MapMemory),
	OWN(DeviceWaitIdle), OWN(QueueWaitIdle), OWN(DestroySemaphore),
};

static PFN_vkVoidFunction find_own(char const *name) {
	for (size_t i = 0; i < sizeof own / sizeof *own; i++)
		if (strcmp(own[i].name, name) == 0) return own[i].f;
	return NULL;
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL GetDeviceProcAddr(VkDevice handle, char const *name) {
	PFN_vkVoidFunction f = find_own(name);
	return f ? f : find(handle)->next(handle, name);
}

static VKAPI_ATTR PFN_vkVoidFunction VKAPI_CALL GetInstanceProcAddr(VkInstance handle, char const *name) {
	PFN_vkVoidFunction f = find_own(name);
	return f || !handle ? f : instance_next(handle, name);
}

__attribute__((visibility("default"))) VkResult vkNegotiateLoaderLayerInterfaceVersion(VkNegotiateLayerInterface *v) {
	v->loaderLayerInterfaceVersion = 2;
	v->pfnGetInstanceProcAddr = GetInstanceProcAddr;
	v->pfnGetDeviceProcAddr = GetDeviceProcAddr;
	v->pfnGetPhysicalDeviceProcAddr = NULL;
	return VK_SUCCESS;
}
