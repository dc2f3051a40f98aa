// compile reads lines "FILE BINDINGS" and compiles the compute shader of each SPIR-V file with
// the first Vulkan device. BINDINGS has a letter for each binding of set 0: u for a uniform
// buffer, another for a storage buffer. It prints the statistics of the driver's compiler and
// its last internal representation, the assembly of Mesa's drivers:
//
//	driver VERSION
//	kernel FILE
//	stat NAME = VALUE
//	...
//	code
//	...
//	end
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <vulkan/vulkan.h>

enum { MAX_BINDINGS = 32, MAX_TEXTS = 16, MAX_STATS = 64 };

static VkDevice device;
static PFN_vkGetPipelineExecutableStatisticsKHR statistics;
static PFN_vkGetPipelineExecutableInternalRepresentationsKHR representations;

static void check(VkResult r, const char *what) {
	if (r != VK_SUCCESS && r != VK_INCOMPLETE) {
		fprintf(stderr, "%s: error %d\n", what, r);
		exit(1);
	}
}

static void *load(const char *path, size_t *size) {
	FILE *f = fopen(path, "rb");
	if (!f) {
		perror(path);
		exit(1);
	}
	fseek(f, 0, SEEK_END);
	*size = (size_t)ftell(f);
	rewind(f);
	void *data = malloc(*size);
	if (!data || fread(data, 1, *size, f) != *size) {
		fprintf(stderr, "%s: cannot be read\n", path);
		exit(1);
	}
	fclose(f);
	return data;
}

static void openDevice(void) {
	VkApplicationInfo app = {.sType = VK_STRUCTURE_TYPE_APPLICATION_INFO, .apiVersion = VK_API_VERSION_1_2};
	VkInstanceCreateInfo ii = {.sType = VK_STRUCTURE_TYPE_INSTANCE_CREATE_INFO, .pApplicationInfo = &app};
	VkInstance instance;
	check(vkCreateInstance(&ii, NULL, &instance), "vkCreateInstance");
	uint32_t n = 1;
	VkPhysicalDevice adapter;
	check(vkEnumeratePhysicalDevices(instance, &n, &adapter), "vkEnumeratePhysicalDevices");
	if (n == 0) {
		fprintf(stderr, "no device\n");
		exit(3);
	}
	VkPhysicalDeviceProperties about;
	vkGetPhysicalDeviceProperties(adapter, &about);
	printf("driver %u.%u.%u\n", VK_VERSION_MAJOR(about.driverVersion), VK_VERSION_MINOR(about.driverVersion), VK_VERSION_PATCH(about.driverVersion));
	float priority = 1;
	VkDeviceQueueCreateInfo queue = {.sType = VK_STRUCTURE_TYPE_DEVICE_QUEUE_CREATE_INFO, .queueCount = 1, .pQueuePriorities = &priority};
	VkPhysicalDevicePipelineExecutablePropertiesFeaturesKHR feature = {
		.sType = VK_STRUCTURE_TYPE_PHYSICAL_DEVICE_PIPELINE_EXECUTABLE_PROPERTIES_FEATURES_KHR, .pipelineExecutableInfo = VK_TRUE};
	const char *extension = VK_KHR_PIPELINE_EXECUTABLE_PROPERTIES_EXTENSION_NAME;
	VkDeviceCreateInfo di = {.sType = VK_STRUCTURE_TYPE_DEVICE_CREATE_INFO, .pNext = &feature, .queueCreateInfoCount = 1, .pQueueCreateInfos = &queue,
		.enabledExtensionCount = 1, .ppEnabledExtensionNames = &extension};
	check(vkCreateDevice(adapter, &di, NULL, &device), "vkCreateDevice");
	statistics = (PFN_vkGetPipelineExecutableStatisticsKHR)vkGetDeviceProcAddr(device, "vkGetPipelineExecutableStatisticsKHR");
	representations = (PFN_vkGetPipelineExecutableInternalRepresentationsKHR)vkGetDeviceProcAddr(device, "vkGetPipelineExecutableInternalRepresentationsKHR");
}

// report prints what the compiler reports of a pipeline, which has one shader.
static void report(VkPipeline pipeline) {
	VkPipelineExecutableInfoKHR which = {.sType = VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_INFO_KHR, .pipeline = pipeline};
	VkPipelineExecutableStatisticKHR stats[MAX_STATS] = {0};
	uint32_t n = MAX_STATS;
	for (uint32_t i = 0; i < n; i++)
		stats[i].sType = VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_STATISTIC_KHR;
	check(statistics(device, &which, &n, stats), "vkGetPipelineExecutableStatisticsKHR");
	for (uint32_t i = 0; i < n; i++)
		printf("stat %s = %llu\n", stats[i].name, (unsigned long long)stats[i].value.u64);
	VkPipelineExecutableInternalRepresentationKHR texts[MAX_TEXTS] = {0};
	n = MAX_TEXTS;
	for (uint32_t i = 0; i < n; i++)
		texts[i].sType = VK_STRUCTURE_TYPE_PIPELINE_EXECUTABLE_INTERNAL_REPRESENTATION_KHR;
	check(representations(device, &which, &n, texts), "vkGetPipelineExecutableInternalRepresentationsKHR");
	if (n == 0)
		return;
	VkPipelineExecutableInternalRepresentationKHR *code = &texts[n - 1];
	for (uint32_t i = 0; i < n; i++)
		texts[i].pData = malloc(texts[i].dataSize + 1);
	check(representations(device, &which, &n, texts), "vkGetPipelineExecutableInternalRepresentationsKHR");
	printf("code\n%.*s\n", (int)code->dataSize, (char *)code->pData);
	for (uint32_t i = 0; i < n; i++)
		free(texts[i].pData);
}

static void compile(const char *path, const char *kinds) {
	size_t size;
	uint32_t *words = load(path, &size);
	uint32_t n = (uint32_t)strlen(kinds);
	VkDescriptorSetLayoutBinding bindings[MAX_BINDINGS] = {0};
	for (uint32_t i = 0; i < n; i++)
		bindings[i] = (VkDescriptorSetLayoutBinding){.binding = i, .descriptorCount = 1, .stageFlags = VK_SHADER_STAGE_COMPUTE_BIT,
			.descriptorType = kinds[i] == 'u' ? VK_DESCRIPTOR_TYPE_UNIFORM_BUFFER : VK_DESCRIPTOR_TYPE_STORAGE_BUFFER};
	VkDescriptorSetLayoutCreateInfo si = {.sType = VK_STRUCTURE_TYPE_DESCRIPTOR_SET_LAYOUT_CREATE_INFO, .bindingCount = n, .pBindings = bindings};
	VkDescriptorSetLayout set;
	check(vkCreateDescriptorSetLayout(device, &si, NULL, &set), "vkCreateDescriptorSetLayout");
	VkPipelineLayoutCreateInfo li = {.sType = VK_STRUCTURE_TYPE_PIPELINE_LAYOUT_CREATE_INFO, .setLayoutCount = 1, .pSetLayouts = &set};
	VkPipelineLayout layout;
	check(vkCreatePipelineLayout(device, &li, NULL, &layout), "vkCreatePipelineLayout");
	VkShaderModuleCreateInfo mi = {.sType = VK_STRUCTURE_TYPE_SHADER_MODULE_CREATE_INFO, .codeSize = size, .pCode = words};
	VkShaderModule module;
	check(vkCreateShaderModule(device, &mi, NULL, &module), path);
	VkComputePipelineCreateInfo pi = {.sType = VK_STRUCTURE_TYPE_COMPUTE_PIPELINE_CREATE_INFO, .layout = layout,
		.flags = VK_PIPELINE_CREATE_CAPTURE_STATISTICS_BIT_KHR | VK_PIPELINE_CREATE_CAPTURE_INTERNAL_REPRESENTATIONS_BIT_KHR,
		.stage = {.sType = VK_STRUCTURE_TYPE_PIPELINE_SHADER_STAGE_CREATE_INFO, .stage = VK_SHADER_STAGE_COMPUTE_BIT, .module = module, .pName = "main"}};
	VkPipeline pipeline;
	check(vkCreateComputePipelines(device, VK_NULL_HANDLE, 1, &pi, NULL, &pipeline), path);
	printf("kernel %s\n", path);
	report(pipeline);
	printf("end\n");
	fflush(stdout);
	vkDestroyPipeline(device, pipeline, NULL);
	vkDestroyShaderModule(device, module, NULL);
	vkDestroyPipelineLayout(device, layout, NULL);
	vkDestroyDescriptorSetLayout(device, set, NULL);
	free(words);
}

int main(void) {
	openDevice();
	char path[4096], kinds[MAX_BINDINGS + 1];
	while (scanf("%4095s %32s", path, kinds) == 2)
		compile(path, kinds);
	return 0;
}
